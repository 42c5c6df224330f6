"""The checker: replays a plan on all ranks at once, and proves it."""
