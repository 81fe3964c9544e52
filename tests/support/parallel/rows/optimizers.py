"""Optimizers whose missed steps are caught up with in one, and those whose are replayed one by one."""

import optax

SCHEDULE = optax.linear_schedule(0.1, 0.02, 40)
COSINE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 30, 250, 1e-3)
STEPS = optax.piecewise_constant_schedule(0.1, {20: 0.1, 100: 5.0, 200: 0.5})
IN_ONE: dict[str, optax.GradientTransformation] = {
    "momentum": optax.sgd(0.1, 0.9),
    "nesterov": optax.sgd(SCHEDULE, 0.99, nesterov=True),
    "no momentum": optax.sgd(0.1, 0.0),
    "momentum, decay": optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.05), optax.scale(-0.1)),
    "adam": optax.adam(1e-2),
    "adam, scheduled": optax.adam(SCHEDULE, 0.8, 0.99),
    "adam, large eps": optax.adam(0.1, eps=1e-2),
    "adam without b1": optax.adam(1e-2, b1=0.0),
    "adamw": optax.adamw(1e-2, weight_decay=0.05),
    "adamw, linear": optax.adamw(SCHEDULE, weight_decay=0.05),
    "adamw, warm-up and cosine": optax.adamw(COSINE, weight_decay=0.1),
    "adamw, piecewise": optax.adamw(STEPS, weight_decay=0.1),
    "adamw, strong": optax.adamw(optax.linear_schedule(0.9, 0.5, 9), weight_decay=1.0),
    "momentum, scheduled decay": optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.sgd(COSINE)),
    "decay alone": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(STEPS)),
    "rate zero at first": optax.chain(optax.add_decayed_weights(0.05), optax.sgd(optax.linear_schedule(0.0, 0.1, 9))),
    "rmsprop": optax.rmsprop(1e-2),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}
ONE_BY_ONE: dict[str, optax.GradientTransformation] = {
    "adam, eps_root": optax.adam(1e-2, eps_root=1e-6),
    "lion": optax.lion(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
}
