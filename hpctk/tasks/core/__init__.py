"""What training jobs share: settings, the training loop, the run's folder, curves and pictures."""
