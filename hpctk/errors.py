"""The exceptions hpctk raises, all of them.

A message names the rank, the operation and the sizes where they matter, and says what to do next.
"""


class HpctkError(Exception):
    """Base of everything hpctk raises on purpose."""


class SettingError(HpctkError, ValueError):
    """A setting, argument or environment variable is unknown or out of range."""


class TensorError(HpctkError, TypeError):
    """A tensor cannot travel or be summed the way it was asked to."""


class MismatchError(HpctkError):
    """The ranks disagree; every rank raises this with the same text."""


class PeerError(HpctkError):
    """Another rank failed, left, or did not arrive before the deadline."""
