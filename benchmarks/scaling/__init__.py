"""The library's cost beyond training, against everything that can grow."""
