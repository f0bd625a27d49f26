"""What watches an engine: observers, traces, counters. Watching never changes what is generated."""
