"""Rules for λ: the paper's, and one that listens to unseen data. A rule of one's own derives from `Damping`."""

from shf.damping.heldout import HeldOut
from shf.damping.levenberg import LevenbergMarquardt
from shf.damping.rule import Damping
from shf.info import DampingBound

__all__ = ["Damping", "DampingBound", "HeldOut", "LevenbergMarquardt"]
