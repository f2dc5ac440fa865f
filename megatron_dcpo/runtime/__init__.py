"""Devices, process groups, Megatron-core on the CPU, signals, watchdog, locks, timers.

The only room that knows whether CUDA exists: the others ask ``device.capabilities()``. Importing it imports nothing else.
"""
