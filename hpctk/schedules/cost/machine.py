"""A machine in ten numbers: what the cost model knows of a network, a node and an engine.

The numbers come from a short measurement on the user's own machines and are kept in their calibration file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

from hpctk.errors import SettingError

FORMAT = "hpctk-machine"
VERSION = 1
#: What files of earlier versions lack; the defaults are what those versions did.
LATER = ("sends", "part_sends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Figures for the cost model; the defaults are those of an ordinary 10 Gbit/s cluster.

    Attributes
    ----------
    latency_s : float
        Seconds a round costs whatever it carries.
    message_s : float
        Seconds of processor time to send and receive one segment.
    byte_s : float
        Seconds per byte of one rank on the network, one way. Measure it with all ranks of a node at work:
        they share the node's link.
    combine_byte_s : float
        Seconds to add one byte to another, as far as the engine cannot hide it.
    exchange_factor : float
        How much slower bytes are while two ranks send to each other: 1 is full, 2 is half duplex. By default a little
        more than 1: where backward goes on meanwhile, or ranks share cores, a ring is ahead for long messages.
    segment_bytes : int
        The size the engine cuts messages into. By default below the eager limit of Open MPI's TCP, so that two ranks
        that send to each other at once both get the full bandwidth, and long enough that the work per message does not
        count.
    local_latency_s, local_byte_s : float
        The same inside a node, through shared memory.
    sends, part_sends : int
        Sends of a run that the engine has under way at once, and of one that brings the parts of AdaCons together. No
        price depends on them.
    """

    latency_s: float = 50e-6
    message_s: float = 10e-6
    byte_s: float = 0.8e-9
    combine_byte_s: float = 0.1e-9
    exchange_factor: float = 1.1
    segment_bytes: int = 61440
    local_latency_s: float = 5e-6
    local_byte_s: float = 0.2e-9
    sends: int = 24
    part_sends: int = 8

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name))

    def inside(self) -> "Machine":
        """Return the machine as seen by ranks that all share one node."""
        return replace(self, latency_s=self.local_latency_s, byte_s=self.local_byte_s, exchange_factor=1.0)

    def to_document(self) -> dict[str, Any]:
        """Return the machine's part of a calibration file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Machine":
        """Return the machine that `to_document` wrote down; SettingError if it is not one."""
        figures = dict(document)
        if figures.pop("format", None) != FORMAT:
            raise SettingError(f'machine file: "format" must be "{FORMAT}"')
        version = figures.pop("version", None)
        if version != VERSION:
            raise SettingError(f"machine file: version={version!r}; this hpctk reads {VERSION}: measure again")
        names = [item.name for item in fields(cls)]
        for key in figures:
            if key not in names:
                raise SettingError(f"machine file: unknown key {key!r}; allowed are {', '.join(names)}")
        for name in names:
            if name not in figures and name not in LATER:
                raise SettingError(f"machine file: key {name!r} is missing; measure again or add it")
        return cls(**figures)


def _check(name: str, value: Any) -> None:
    if name in ("segment_bytes", *LATER):
        if type(value) is not int or value < 1:
            raise SettingError(f"{name}={value!r}: allowed are whole numbers from 1")
        return
    least = 1.0 if name == "exchange_factor" else 0.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < least:
        raise SettingError(f"{name}={value!r}: allowed are finite numbers from {least:g}")
