"""Who owns which part of the model's memory: pages.py (allocator), groups.py (sizes of the pools).

Belongs here: counting and handing out pages and slots. Does not belong here: tensors (model/state.py), policy
(engine/).
"""
