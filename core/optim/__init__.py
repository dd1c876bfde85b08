"""What optimizers consist of, as values: param groups, slots, schedules. May import `state` and everything below it.

The pure optimizer that computes is `step.optimizer`, because the mutable torch optimizer inside of it belongs to the engine of the step.
"""
