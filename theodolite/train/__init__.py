"""Tools for a user's own training: LocAteR, the monitor, QK-Clip, and callbacks for the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from theodolite.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from theodolite.train.callbacks import GeometryCallback as GeometryCallback
    from theodolite.train.callbacks import LocaterCallback as LocaterCallback
    from theodolite.train.locater import Locater as Locater
    from theodolite.train.locater import locater_penalty as locater_penalty
    from theodolite.train.locater import warm_up as warm_up
    from theodolite.train.monitor import GeometryMonitor as GeometryMonitor
    from theodolite.train.qk_clip import QKClip as QKClip
    from theodolite.train.qk_clip import QKClipCallback as QKClipCallback

__all__, __getattr__, __dir__ = lazy_names(__name__)
