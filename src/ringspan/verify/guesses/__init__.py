"""Every known mistake with the numbers it would give, computed by the oracle."""

from ringspan.verify.guesses.base import Guess, Setting
from ringspan.verify.guesses.gradients import guess_gradients
from ringspan.verify.guesses.masks import guess_masks
from ringspan.verify.guesses.merges import guess_merges
from ringspan.verify.guesses.rearranged import guess_rearranged
from ringspan.verify.guesses.schedules import guess_schedules

__all__ = ["Guess", "Setting", "guess_gradients", "guess_masks", "guess_merges", "guess_rearranged", "guess_schedules"]
