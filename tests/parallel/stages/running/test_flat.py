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


def test_what_goes_along_samples_lies_side_by_side() -> None:
    arrays = [
        jnp.arange(12.0).reshape(4, 3),
        jnp.arange(4.0),
        jnp.arange(6.0).reshape(2, 3),
        jnp.ones((3, 4)),
        jnp.ones(5),
    ]
    form = Flat(arrays, dims=[0, 0, None, 1, None])
    buffers = form.pack(arrays)
    assert [one.shape for one in buffers] == [(4, 4), (11,), (3, 4)]
    assert form.dims == [0, None, 1]
    np.testing.assert_array_equal(buffers[0][1], [3, 4, 5, 1])  # of sample 1
    for one, other in zip(form.unpack(buffers), arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_said_to_stay_apart_does() -> None:
    arrays = [jnp.ones(3), jnp.zeros(2), jnp.arange(4.0)]
    form = Flat(arrays, apart=[1])
    assert [one.shape for one in form.pack(arrays)] == [(7,), (2,)]
    assert form.of_buffers("abc", lambda shape, dim: (shape, dim)) == [((7,), None), "b"]


def test_sums_along_what_lies_side_by_side_are_taken_apart() -> None:
    arrays = [jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 2, 2)), jnp.arange(4.0), jnp.ones(5), jnp.ones((2, 9))]
    form = Flat(arrays, dims=[0, 0, None, None, 0], apart=[4])
    buffers = form.pack(arrays)
    assert form.dims == [0, None, 0]
    summed = [one if dim is None else one.sum(dim) for one, dim in zip(buffers, form.dims, strict=True)]
    wanted = [*(one.sum(0) for one in arrays[:2]), *arrays[2:4], arrays[4].sum(0)]
    for one, other in zip(form.unpack(summed, summed=True), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_needed_longer_shares_no_buffer_with_the_rest() -> None:
    arrays = [jnp.ones(3), jnp.arange(2.0), jnp.zeros(4), jnp.arange(5.0), jnp.ones(6)]
    form = Flat(arrays, longer=[1, 3])
    buffers = form.pack(arrays)
    np.testing.assert_array_equal(buffers[1], [0, 1, 0, 1, 2, 3, 4])
    assert buffers[0].shape == (3 + 4 + 6,)
    assert form.holding([1]) == form.holding([1, 3]) == [1]
    for one, other in zip(form.unpack(buffers), arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_lies_turned_has_a_buffer_of_its_own() -> None:
    arrays = [jnp.arange(12.0).reshape(4, 3), jnp.ones((3, 2)), jnp.arange(6.0).reshape(3, 2), jnp.zeros(5)]
    form = Flat(arrays, small_bytes=25, turned=[0, 2])
    assert form.turned == {0}  # the third one lies with other small ones
    buffers = form.pack(arrays)
    assert [one.shape for one in buffers] == [(17,), (3, 4)]
    for one, other in zip(form.unpack(buffers), arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(form.unpack(form.added(buffers, arrays))[0], 2 * arrays[0])
