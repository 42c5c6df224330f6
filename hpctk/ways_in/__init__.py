"""What all ways into hpctk share: the handshake, buckets, counting, GradScalers."""
