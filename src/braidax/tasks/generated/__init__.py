"""Samples that are made up, in the very files that real ones come in: for measuring where the real ones are not."""

from .images import write_cifar10, write_image_folders
from .texts import write_reviews

__all__ = ["write_cifar10", "write_image_folders", "write_reviews"]
