"""Ranks of a torch.distributed process group: the only place, beside hpctk.ddp, that imports it."""
