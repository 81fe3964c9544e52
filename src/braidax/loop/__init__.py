"""The training loop, written once: short enough to copy and change."""

from braidax.loop.evaluating import Evaluating as Evaluating
from braidax.loop.evaluating import TestMetrics as TestMetrics
from braidax.loop.evaluating import evaluate as evaluate
from braidax.loop.fitting import fit as fit
from braidax.loop.steps import Tuning as Tuning
