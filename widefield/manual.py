"""What do `widefield --help` and `widefield VERB --help` teach?  The texts before the lists of arguments."""

MAIN = """\
Train convolutional networks on images of any size, on any number of devices,
with the numbers that one device with endless memory would give.

  widefield train recipes/digits.yaml                      a first run, in seconds
  widefield train recipes/digits.yaml mesh.replicate=2     the same numbers, on two ranks
  widefield evaluate runs/0001                             every image exactly once
  widefield report runs/0001                               one HTML file
  widefield verify timm/resnet50 --image 3x97x101          is it exact with its images cut over devices?
  widefield bench recipes/digits.yaml                      which plan is fastest on this machine?
  widefield train recipes/page.yaml mesh.space=[] 'stream.tiles=[4,4]'   one device, tile after tile

widefield VERB --help explains each verb.
"""
TRAIN = """\
Train as a recipe says.  Keys of the recipe can be set on the command line, dotted:

  widefield train recipes/digits.yaml --run runs/first
  widefield train recipes/digits.yaml optimizer.lr=0.2 schedule.length=5ep seed=3
  widefield train recipes/imagefolder.yaml data.path=photos model.name=timm/resnet50

The same command with the same --run goes on where the run stopped: after Ctrl-C, SIGTERM, a crash or
a kill.  Ctrl-C saves after the step it is in; a second one ends at once.

Ranks: one per GPU is started here, or as many as mesh.replicate asks.  Under torchrun, srun, mpirun or
Kubeflow the same command sees its place in the environment and starts nothing:

  torchrun --nproc-per-node 8 -m widefield train recipes/imagefolder.yaml data.path=photos --run-dir runs/big
  srun --ntasks 16 widefield train recipes/imagefolder.yaml data.path=photos --run runs/big

(torchrun takes --run for an abbreviation of its own --run-path; --run-dir means the same and passes.)
"""
EVALUATE = """\
Evaluate a run's weights on its evaluation split: every image exactly once, on any number of ranks.

  widefield evaluate runs/0001
  widefield evaluate runs/0001 mesh.replicate=2 data.evaluate_batch_size=512
  widefield evaluate runs/0001 data.path=other_photos
  widefield evaluate runs/mine model.name=my_package.nets:build      the run's own model, named by you

A run folder's config.yaml may not name code of its own, for the folder may be anybody's; --trust lets it.
"""
PREDICT = """\
Ask a run's model about image files.

  widefield predict runs/0001 cat.jpg dog.png
  widefield predict runs/0001 scans/*.tiff --top 5
"""
EXPORT = """\
Write a run's model for use without widefield.

  widefield export runs/0001 --to safetensors            names and shapes of the plain model
  widefield export runs/0001 --to state_dict             for torch.load(..., weights_only=True)
  widefield export runs/0001 --to onnx --output net.onnx
"""
VERIFY = """\
Does a model give one device's numbers when its images are cut into tiles?  Runs it whole and cut, in
float64 on the CPU, and compares outputs, every gradient and the running statistics.

Tiles in space (--space), each on a rank of its own, started here; 2 if neither is given:

  widefield verify timm/resnet50 --image 3x97x101 --space 2x1
  widefield verify timm/vit_tiny_patch16_224 --image 3x96x96 --space 2x2 img_size=96
  widefield verify my_package.nets:build --image 1x32x33x34 --space 2x1x2 --batch 1 --eval

Tiles in time (--stream), one after another in this process; with both, each rank streams its tile:

  widefield verify timm/resnet50 --image 3x250x190 --stream 4x4
  widefield verify unet --image 1x250x190 --space 2x1 --stream 2x3

Any plan (--plan), three training steps on ranks started here against three on one device, the batch
shared out: losses, gradients, weights, statistics, outputs.  The file has a plan's keys:

  printf 'shard: 2\nchannel: 2\n' > plan.yaml
  widefield verify timm/resnet18 --image 3x65x65 --batch 4 --plan plan.yaml

Exits with 0 where everything agrees, with 1 where it does not (the layers that differ are listed, the
first one first), with 2 where the model cannot run so, in words.
"""
BENCH = """\
Which way of using this machine is fastest for this model, these images and this batch?  Tries plans one
after another, each in processes of its own, from the same weights on the same batches, once with the
recipe's loader and once with a batch held in memory; prints a table and writes bench.json, bench.csv and
report.html.

  widefield bench recipes/digits.yaml
  widefield bench recipes/page.yaml --ranks 2 --steps 5
  widefield bench recipes/digits.yaml --plans 'replicate=2; mesh.replicate=2 gradient.bucket_mib=1'
  widefield bench recipes/imagefolder.yaml data.path=photos --trap

A plan that cannot run is listed with the reason.  Where plans wait for the loader they are not ranked.
--trap runs one plan with few and with many loader workers: what a comparison measures that gives them
unequally.  Exits with 0, with 1 where a plan failed, with 2 where none could run.
"""
REPORT = """\
Write (again) the report of a run or of a comparison: one HTML file that needs nothing else.

  widefield report runs/0001
  widefield report runs/bench-0001
"""
