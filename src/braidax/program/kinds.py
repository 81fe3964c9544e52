"""Kinds of primitives: what they do with the elements of their operands."""

from typing import Any

from jax.extend.core import primitives as p

TRANSCENDENTAL: frozenset[Any] = frozenset(
    {
        p.acos_p, p.acosh_p, p.asin_p, p.asinh_p, p.atan_p, p.atan2_p, p.atanh_p, p.bessel_i0e_p, p.bessel_i1e_p,
        p.cbrt_p, p.cos_p, p.cosh_p, p.digamma_p, p.erf_p, p.erf_inv_p, p.erfc_p, p.exp_p, p.exp2_p, p.expm1_p,
        p.igamma_p, p.igammac_p, p.lgamma_p, p.log_p, p.log1p_p, p.logistic_p, p.polygamma_p, p.pow_p,
        p.regularized_incomplete_beta_p, p.rsqrt_p, p.sin_p, p.sinh_p, p.sqrt_p, p.tan_p, p.tanh_p,
    }
)  # fmt: skip
"""Counted apart from other arithmetic, as XLA does."""

MOVING: frozenset[Any] = frozenset(
    {
        p.bitcast_convert_type_p, p.convert_element_type_p, p.copy_p, p.device_put_p, p.name_p, p.reduce_precision_p,
        p.sharding_constraint_p, p.stop_gradient_p, p.real_p, p.imag_p, p.complex_p,
    }
)  # fmt: skip
"""No arithmetic at all."""

ARITHMETIC: frozenset[Any] = frozenset(
    {
        p.abs_p, p.add_p, p.add_jaxvals_p, p.and_p, p.ceil_p, p.clamp_p, p.clz_p, p.conj_p, p.div_p, p.eq_p, p.eq_to_p,
        p.floor_p, p.ge_p, p.gt_p, p.integer_pow_p, p.is_finite_p, p.le_p, p.le_to_p, p.lt_p, p.lt_to_p, p.max_p,
        p.min_p, p.mul_p, p.ne_p, p.neg_p, p.nextafter_p, p.not_p, p.or_p, p.population_count_p, p.rem_p, p.round_p,
        p.select_n_p, p.shift_left_p, p.shift_right_arithmetic_p, p.shift_right_logical_p, p.sign_p, p.square_p,
        p.sub_p, p.xor_p,
    }
)  # fmt: skip
"""One operation for each element."""

ELEMENTWISE: frozenset[Any] = TRANSCENDENTAL | MOVING | ARITHMETIC
"""Every element of the result is computed from the same element of the operands."""

REDUCTIONS: frozenset[Any] = frozenset(
    {p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_prod_p, p.reduce_and_p, p.reduce_or_p}
)
"""One value of all elements along `axes`."""

ARGUMENTS: frozenset[Any] = frozenset({p.argmax_p, p.argmin_p})
"""Where along `axes` such a value stands."""

CUMULATIVE: frozenset[Any] = frozenset({p.cumsum_p, p.cummax_p, p.cummin_p, p.cumprod_p, p.cumlogsumexp_p})
"""Of all elements before, along `axis`."""

SLICES: frozenset[Any] = frozenset({p.slice_p, p.dynamic_slice_p, p.dynamic_update_slice_p, p.pad_p})
"""A part of an array, or one that an array is part of."""

SCATTERS: frozenset[Any] = frozenset({p.scatter_p, p.scatter_add_p, p.scatter_mul_p})
"""Updates at indices."""
