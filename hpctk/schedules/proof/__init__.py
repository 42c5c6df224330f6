"""The checker of schedules: replays a plan on all ranks at once, in one process, and proves it."""
