"""The former place of `braidax.torch`, under which programs may still import it."""

from braidax.torch import DataLoader as DataLoader
