"""The one door to torch, and the little that is asked of it besides its DataLoader."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

from braidax.data.workers.threads import Threads
from braidax.errors import import_extra


def torch_library() -> Any:
    """Returns the module `torch`. **Raises:** `MissingExtra`."""
    return import_extra("torch", "torch", purpose="braidax.torch")


def rank_and_size() -> tuple[int, int]:
    """Returns this process' rank in torch.distributed's group and the group's size: `(0, 1)` where there is none."""
    distributed = torch_library().distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def agreed_seed(generator: Any) -> int:
    """Draws a seed from a torch generator (None: the global one, which `torch.manual_seed` sets).

    Under torch.distributed all ranks get what rank 0 draws, so all have to call this.
    """
    torch = torch_library()
    drawn = [int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())]
    if rank_and_size()[1] > 1:
        torch.distributed.broadcast_object_list(drawn, src=0)
    return drawn[0]


def one_core_each(threads: Threads, num_threads: int) -> None:
    """Makes torch compute on one core in each of these threads, as it does in its own worker processes.

    Otherwise each of them would start as many threads of torch's own as there are cores. torch also remembers the
    number last set for threads to come; a thread made for that sets it back.
    """
    torch = torch_library()
    usual, all_here = _in_a_thread(torch.get_num_threads), threading.Barrier(num_threads)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread takes over the number last set
        torch.set_num_threads(1)
        all_here.wait(timeout=60)  # so that each thread takes one of these calls

    for done in [threads.submit(begin) for _ in range(num_threads)]:
        done.result(60)
    _in_a_thread(lambda: torch.set_num_threads(usual))


def _in_a_thread(work: Callable[[], Any]) -> Any:
    threads = Threads(1, "braidax-torch-setup")
    try:
        return threads.submit(work).result(60)
    finally:
        threads.close(timeout_seconds=60)


def consumer_modes() -> Callable[[], None]:
    """Returns a function that gives another thread the modes of this one that torch keeps per thread."""
    torch = torch_library()
    grad, device = torch.is_grad_enabled(), torch.get_default_device()

    def take_over() -> None:
        torch.set_grad_enabled(grad)
        if torch.get_default_device() != device:
            torch.set_default_device(device)

    return take_over


def pinning() -> Callable[[Any], Any] | None:
    """Returns torch's own function that puts a batch into pinned memory, or None, with a warning, where it cannot."""
    torch = torch_library()
    if not torch.accelerator.is_available():
        warnings.warn("pin_memory=True has no effect: torch finds no accelerator", stacklevel=4)
        return None
    kind = torch.accelerator.current_accelerator().type
    if kind == "mps":
        warnings.warn("pin_memory=True has no effect: torch cannot pin memory for MPS", stacklevel=4)
        return None
    number = torch.accelerator.current_device_index()

    def pin(batch: Any) -> Any:
        torch.accelerator.set_device_index(number)  # kept per thread; a context on device 0 would cost memory there
        return torch.utils.data._utils.pin_memory.pin_memory(batch, kind)

    return pin
