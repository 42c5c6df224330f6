"""What sparse all-reduces are made of: balanced ranges, blocks of pairs, the largest of a sum, packets of all ranks."""
