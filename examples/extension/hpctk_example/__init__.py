"""A method, a compressor and a schedule for hpctk. This file imports nothing: `star` needs no torch."""
