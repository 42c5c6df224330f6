"""What runs plans: dense and ragged blocks, segments, handles, and the small gathers collectives are made of."""
