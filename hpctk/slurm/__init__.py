"""Job scripts for Slurm: templates (hpctk.templates, the folder slurm/ of the project) with a user's values in them.

options     what a job script may be told, checked; defaults of a site, from a TOML file
render      options -> the text of a job script; pure
commands    sbatch: is it there, does it take the script, submit it
"""
