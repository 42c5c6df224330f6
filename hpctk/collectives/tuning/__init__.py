"""What chooses schedules: calibration, prices of this machine, clocks."""
