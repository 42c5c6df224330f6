"""The oracle: every method simulated in one process, all workers, numpy float64, from specs/ alone.

`simulate(problem, steps, base, *, lr=None, **settings) -> Trajectory`, with the settings of the method's
constructor. Nothing here imports hpctk.
"""

from . import adacons, baselines, celgc, diloco, ef21, episode, grawa, saef, sasg

#: The simulation of each method, by the name of its constructor.
SIMULATIONS = {
    "AdaCons": adacons.simulate,
    "SASG": sasg.simulate,
    "SAEF": saef.simulate,
    "MGRAWA": grawa.mgrawa,
    "LGRAWA": grawa.lgrawa,
    "CELGC": celgc.simulate,
    "EPISODE": episode.simulate,
    "EF21": ef21.simulate,
    "DiLoCo": diloco.simulate,
    "Mean": baselines.mean,
    "LocalSGD": baselines.local_sgd,
    "EASGD": baselines.easgd,
    "LSGD": baselines.lsgd,
}
