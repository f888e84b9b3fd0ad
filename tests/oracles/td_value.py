"""TD(lambda) of the probability of success in a chain, one number at a time: `algorithms.outcome_value` is held to it.

Written from Sutton and Barto 2018, ch. 12, with loops and plain numbers; it shares no code with rlvlm. An episode is
the list of the states that it visited, and an outcome that is paid after the last of them.
"""


def lambda_return(outcome, values, step, gamma, lam):
    """The lambda-return of a step as the weighted sum of its n-step returns; `values` of all states of the episode."""
    total, last = 0.0, len(values) - 1
    for n in range(1, last - step + 1):  # these bootstrap
        total += (1 - lam) * lam ** (n - 1) * gamma**n * values[step + n]
    return total + lam ** (last - step) * gamma ** (last - step) * outcome


def chain_values(num_states, p_right, gamma):
    """Exact values of a walk on 0 to num_states - 1 that steps right with p_right, else left, and ends beyond either
    end: with a success on the right, a failure on the left. Found by sweeps over Bellman's equation.
    """
    values = [0.0] * num_states
    for _ in range(20_000):
        for state in range(num_states):
            right = 1.0 if state == num_states - 1 else gamma * values[state + 1]
            left = 0.0 if state == 0 else gamma * values[state - 1]
            values[state] = p_right * right + (1 - p_right) * left
    return values


def fitted_values(episodes, outcomes, num_states, gamma, lam, rounds):
    """A table of values: in each round the value of a state becomes the mean of its targets, computed before it."""
    table = [0.5] * num_states
    for _ in range(rounds):
        targets = [[] for _ in range(num_states)]
        for states, outcome in zip(episodes, outcomes, strict=True):
            values = [table[state] for state in states]
            for step, state in enumerate(states):
                targets[state].append(lambda_return(outcome, values, step, gamma, lam))
        table = [sum(found) / len(found) if found else old for found, old in zip(targets, table, strict=True)]
    return table
