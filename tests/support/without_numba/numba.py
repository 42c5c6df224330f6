"""Hides numba from whoever has this folder on PYTHONPATH."""

raise ModuleNotFoundError("No module named 'numba'", name="numba")
