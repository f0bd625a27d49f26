"""Those who watch an engine: observers, traces, counters. Watching never changes what is generated."""
