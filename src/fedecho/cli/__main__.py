""""""

from fedecho.cli import main

main()
