"""Arrays in few buffers."""

import jax
import jax.numpy as jnp
import numpy as np

from braidax.parallel.stages.running.flat import Flat


def test_small_arrays_of_a_type_lie_in_one_buffer() -> None:
    arrays = [
        jnp.arange(6.0).reshape(2, 3),
        jnp.ones((), jnp.int32),
        jnp.float32(7.0),
        jnp.zeros((40, 40)),
        jnp.int32(3),
    ]
    arrays += [jax.random.key(1), jnp.ones(2, jnp.bfloat16)]
    form = Flat(arrays, small_bytes=1024)
    buffers = form.pack(arrays)
    assert [(one.shape, str(one.dtype)) for one in buffers[:2]] == [((7,), "float32"), ((2,), "int32")]
    assert form.alone_places == [(2, 3), (3, 5), (4, 6)]  # large, a key, the only one of its type
    for one, other in zip(form.unpack(buffers), arrays, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert jnp.all(one == other)
    joined = form.joined(form.small(arrays))
    np.testing.assert_array_equal(joined[0], [0, 1, 2, 3, 4, 5, 7])
    assert [one.shape for one in form.alone(arrays)] == [(40, 40), (), (2,)]
