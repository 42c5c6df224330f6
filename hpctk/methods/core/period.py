"""Checks of the settings that model methods share."""

from __future__ import annotations

from hpctk.errors import SettingError


def check_period(period: int) -> None:
    """Raise SettingError unless `period` is a whole number of steps."""
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise SettingError(f"period={period!r}: need a whole number of steps, 1 or more")


def check_share(name: str, value: float) -> None:
    """Raise SettingError unless `value` is a share: a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise SettingError(f"{name}={value!r}: need a number from 0 to 1")
