"""What a method computes beside the base optimizer's step: passes over gradients, residuals and models.

Nanoseconds for each parameter, in every step and, for methods with local steps, in every round. The figures below
were measured in one run of two ranks, one core each (`hpctk mpirun -n 2 hpctk advise ...` measures yours, and keeps
them in the calibration file); those of DDP, EPISODE, DiLoCo, LSGD, SparseLoCo and MGRAWA with ChunkTopK are estimates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from hpctk.errors import SettingError

#: Key in a calibration file.
KEY = "local_work"


@dataclass(frozen=True)
class Passes:
    """Nanoseconds for each parameter: in every step, and in a round beside it."""

    step_ns: float = 0.0
    round_ns: float = 0.0

    def seconds(self, params: int, period: int = 1) -> float:
        """Return the seconds of a step, of which one in `period` ends in a round."""
        return 1e-9 * params * (self.step_ns + self.round_ns / period)


#: By the key of a way.
ORDINARY: Mapping[str, Passes] = {
    "ddp": Passes(0.8),
    "ddp fp16": Passes(2.2),
    "mean": Passes(1.9),
    "adacons": Passes(5.5),
    "half": Passes(21.1),
    "top_k": Passes(8.3),
    "random_k": Passes(12.8),
    "sign": Passes(13.6),
    "qsgd": Passes(26.9),
    "power_sgd": Passes(21.3),
    "saef top_k": Passes(6.2),
    "saef sign": Passes(5.7),
    "ef21": Passes(19.0),
    "sasg": Passes(15.8),
    "local_sgd": Passes(2.2, 0.1),
    "celgc": Passes(4.3, 0.3),
    "mgrawa": Passes(3.3, 7.6),
    "mgrawa chunk": Passes(3.3, 12.0),
    "lgrawa": Passes(6.2, 2.5),
    "episode": Passes(1.5, 4.0),
    "diloco": Passes(0.0, 4.0),
    "sparse_loco": Passes(0.0, 20.0),
    "easgd": Passes(1.3, 9.2),
    "lsgd": Passes(1.2, 2.0),
}


def from_calibration(text: str) -> dict[str, Passes]:
    """Return what a calibration file says of local work; the ordinary figures for what it does not say."""
    found = json.loads(text).get(KEY, {}) if text else {}
    try:
        measured = {str(key): Passes(float(step), float(more)) for key, (step, more) in found.items()}
    except (TypeError, ValueError, AttributeError):
        raise SettingError(f'calibration file: "{KEY}" must map names to pairs of nanoseconds') from None
    return {**ORDINARY, **measured}


def into_calibration(text: str, measured: Mapping[str, Passes]) -> str:
    """Return the text of a calibration file with measured local work in it."""
    document = json.loads(text)
    document[KEY] = {key: [passes.step_ns, passes.round_ns] for key, passes in measured.items()}
    return json.dumps(document, indent=2) + "\n"
