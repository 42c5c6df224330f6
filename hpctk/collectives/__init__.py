"""Collective operations on tensors: a plan, an engine that runs it, a rule of combining."""
