"""What a plan costs: volume, rounds, and seconds on a machine."""
