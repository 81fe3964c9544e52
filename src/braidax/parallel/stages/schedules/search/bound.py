"""A time below which no schedule is."""

from braidax.parallel.stages.schedules.search.problem import Problem


def shortest_seconds(problem: Problem) -> float:
    """Returns a lower bound of the makespan, from what each stage must wait for and what is left behind it.

    A device begins when its first stage is reached. Before the first gradient comes back to a stage, it can do no more
    than the forwards that fit into memory, and all the rest behind that; and behind its last operation with an input's
    gradient the stages before it have still to do theirs.
    """
    costs, count = problem.costs, problem.num_microbatches
    forward, inputs, weight = costs.forward_seconds, costs.input_seconds, costs.weight_seconds
    stages = range(problem.num_stages)
    lags = [problem.lag(stage) for stage in stages[:-1]]
    reached = [sum(forward[:stage]) + sum(lags[:stage]) for stage in stages]  # when a stage can begin
    round_trip = sum(forward) + sum(lags)
    back = [round_trip + sum(inputs[stage + 1 :]) + sum(lags[stage:]) for stage in stages]
    after = [
        max(
            weight[stage],
            max((sum(inputs[s:stage]) + sum(lags[s:stage]) + weight[s] for s in range(stage)), default=0.0),
        )
        for stage in stages
    ]
    bound = 0.0
    for device in range(problem.num_devices):
        own = [stage for stage in stages if problem.device_of_stage[stage] == device]
        work = count * sum(forward[stage] + inputs[stage] + weight[stage] for stage in own)
        bound = max(bound, min(reached[stage] for stage in own) + work)
        no_weights = count * sum(forward[stage] + inputs[stage] for stage in own)
        bound = max(bound, min(reached[s] for s in own) + no_weights + min(after[stage] for stage in own))
        first_back = min(back[stage] for stage in own)
        room = [
            count
            if problem.limit == float("inf")
            else min(count, int(problem.limit // max(costs.activation_bytes[s], 1)))
            for s in own
        ]
        done = sum(fits * forward[stage] for fits, stage in zip(room, own, strict=True))
        bound = max(bound, first_back + work - done)
    return max(bound, *(back[stage] + inputs[stage] + after[stage] for stage in stages))
