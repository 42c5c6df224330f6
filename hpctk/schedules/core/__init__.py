"""What schedules are written in: plans, the registry, drawing."""
