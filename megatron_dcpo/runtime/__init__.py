"""Devices, process groups, Megatron-core on the CPU, signals, watchdog, locks, timers.

The only room that asks for CUDA: the others ask ``device.capabilities()``. Importing it imports nothing else.
"""
