"""Time fastattn against its peers: `python -m fastattn bench`, kept with the commit in results/.

python bench/compare.py --quick
python bench/compare.py --cases suite --rounds 15 --json
"""

import repository

from fastattn.commands import bench

if __name__ == "__main__":
    parser = repository.parser(__doc__)
    bench.add_options(parser, repository.RESULTS)
    bench.run(parser.parse_args(), repository.commit())
