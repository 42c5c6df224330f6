"""What a training step will cost on a network, by every method, before anything is run: does it pay?"""
