"""Hot: a call becomes a row of this rank's HDF5 file."""
