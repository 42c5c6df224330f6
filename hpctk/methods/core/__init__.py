"""What methods stand on: the life of a step of each kind, the replica, error feedback, clipping, evaluation."""
