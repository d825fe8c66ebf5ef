"""One model over several ranks: schedules as data, and the runtime that executes them."""
