"""What a run will need, computed from its configuration alone: no process group, no weights, no
GPU.
"""
