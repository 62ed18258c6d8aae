"""Solutions of chapter 13."""


def snake(jobs, workers):
    """Rounds dealt forward and backward in turn. Helps where a round is sorted; at D = 256 it isn't."""
    hands = [[] for _ in range(workers)]
    for job in range(jobs):
        turn, place = divmod(job, workers)
        hands[place if turn % 2 == 0 else workers - 1 - place].append(job)
    return hands


def section_heads(seqlen, head_dim, heads, budget):
    """The widest section whose K and V fit the budget and which divides the heads; at least one head."""
    for width in range(heads, 1, -1):
        if heads % width == 0 and 4 * width * seqlen * head_dim <= budget:
            return width
    return 1


def bad_for_early(workers):
    """One long job, short ones for everybody else twice over, and a long one that queues behind the first.

    At time 0 all draw twice. The second draws go in the order in which the first jobs end, so the worker with
    the long job draws last. Early it ends at 20. Late, somebody is free at 2 and ends at 12. Longest first
    helps because the job behind a long one is then no longer than it, and late jobs are short; within a
    section the sum of two is still small against a launch of many rounds. It does not help from one section
    to the next, where a short job is followed by a long one.
    """
    return [10.0] + [1.0] * (2 * workers - 2) + [10.0]
