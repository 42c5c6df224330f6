"""What compressors stand on: packets, residuals, the base class, arithmetic that several share."""
