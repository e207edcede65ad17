"""The package that times: its clocks with fakes, its tables, its checks of results, every part in small."""
