"""For PyTorch: a drop-in for `torch.utils.data.DataLoader` that fetches unordered and in parallel.

Nothing here touches a JAX backend; torch is imported when the first loader is made.
"""

from braidax.torch.loader import DataLoader as DataLoader
