"""What commands share: tables, progress, options of tasks, what an installation has."""
