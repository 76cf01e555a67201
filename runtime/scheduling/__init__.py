"""Who runs in the next step: queues, slots, fairness and texts that are there already.

Integer bookkeeping; no device, no numpy.
"""
