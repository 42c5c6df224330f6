"""Exit statuses by which the ranks of a job tell whoever has started them what to do next."""

from __future__ import annotations

#: "Saved, run me again": what a job's script looks for.
SAVED = 85
#: "Saved, begin me anew with all ranks, now": what `hpctk mpirun --respawn` looks for.
RESPAWN = 86
