# Every target is a thin call; what a target means is written in the script that it calls.
# .config is read by lib/kconf alone and never included here: make would expand $ and # in it.

# Variables of the command line by name, which tells them from what the environment happens to hold. The loops'
# variable is called =, the one name that nobody can give; what nobody may replace says override.
override KCONFIG_MAKE_VARIABLES := $(foreach =,$(.VARIABLES),$(if $(filter command,$(origin $=)),$=))
override PLACES := O VENV PYTHON KCONFIG_CONFIG
override define newline


endef
# They, and what is used of the environment, are judged as they were written before anything expands them: make
# takes a dollar sign for itself, and would run a shell function; a line break ends a recipe.
$(foreach =,$(PLACES) V $(KCONFIG_MAKE_VARIABLES) $(if $(filter environment%,$(origin MAKECMDGOALS)),MAKECMDGOALS),$(if $(findstring $$,$(subst $$$$,,$(value $=))),\
	$(error $= has a dollar sign, which make takes for itself; write $$$$ for each))$(if $(findstring $(newline),$(value $=)),\
	$(error $= has a line break; it is a single line)))

PYTHON ?= python3
VENV ?= .venv
GOMP_SPINCOUNT ?= 10000
KCONFIG_CONFIG ?= .config
# Of a tilde that the shell left alone would become a directory of that name.
TILDED := $(PLACES) $(foreach name,FILE DIRECTORY OUT,$(if $(filter command,$(origin $(name))),$(name)))
$(foreach name,$(TILDED),$(if $(filter ~%,$(firstword $($(name)))),\
	$(error $(name) begins with a tilde that the shell did not replace; write the whole path, or ./~)))
config_is_named := $(filter-out file,$(origin KCONFIG_CONFIG))
# A relative one lies below O=, as in the kernel; one that a make around this one put there already does.
override KCONFIG_CONFIG := $(if $(O),$(if $(filter /% $(O)/%,$(firstword $(KCONFIG_CONFIG))),,$(O)/))$(or $(KCONFIG_CONFIG),.config)

# Threads that wait for work spin this long before they sleep. By default those of GNU OpenMP spin
# for milliseconds, which other programs on a shared machine, and so the threads they wait for, lack.
export GOMP_SPINCOUNT
export KCONFIG_CONFIG
# Where O= puts what is made of the configuration; V=1 also shows where values come from.
export KCONFIG_OUTPUT := $(or $(O),.)
export KCONFIG_VERBOSE := $(V)

# Make hands variables of its command line to every program byte for byte (a dollar sign is written $$).
override KCONFIG_MAKE_KNOWN := PYTHON VENV O V KCONFIG_CONFIG GOMP_SPINCOUNT FILE RUN BEST NAME TASK \
	DIRECTORY PROMPT TEMPERATURE TOP_K SEED TOKENS DEFCONFIG FRAGMENT STRICT SET A B SYM Q \
	KCONFIG_ALLCONFIG KCONFIG_SEED KCONFIG_PROBABILITY KCONFIG_NOSILENTUPDATE ANNEAL_CONFIG_PATH \
	GPU JSON QUICK BUDGET COMPARE EPOCHS BATCH DEVICE CORPUS OUT SWEEP JOBS EXP \
	COLUMN THRESHOLD REFERENCE TOLERANCE TO IMAGE STORAGE ACCELERATOR
export KCONFIG_MAKE_VARIABLES
export KCONFIG_MAKE_KNOWN

$(if $(wildcard scripts/kconf.py),,$(error make works in the source tree: make -C DIRECTORY))
# Make itself could not name the environment's files.
$(if $(word 2,$(VENV)),$(error VENV cannot have a space in its name))

quiet := $(if $(filter 1,$(V)),,@)
quote = '$(subst ','\'',$(1))'
RUNS := $(if $(O),$(O)/runs,runs)
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
KCONF = $(quiet)$(PY) scripts/kconf.py
CLUSTER = $(quiet)$(PY) -m scripts.cluster --runs $(call quote,$(RUNS)) --config $(call quote,$(KCONFIG_CONFIG))
TRAIN = $(quiet)$(PY) -m train --runs $(call quote,$(RUNS))
# These count on the command line alone: NAME and the like mean other things in an environment.
given = $(if $(filter command,$(origin $(1))),$(if $($(1)),$(call quote,$($(1)))))
# An option is an equals sign away from its value, and other words come last: they may begin with a minus.
option = $(if $(call given,$(2)),--$(1)=$(call given,$(2)))
last = $(if $(call given,$(1)),-- $(call given,$(1)))

NAMES := $(filter-out fragments sweeps %~,$(notdir $(wildcard defconfigs/*)))
FRAGMENTS := $(filter-out %~,$(notdir $(wildcard defconfigs/fragments/*)))
# A pattern does not reach across a slash, which no name has: the front says so.
SLASHED := $(foreach goal,$(MAKECMDGOALS),$(if $(findstring /,$(goal)),$(goal)))
override UNKNOWN := $(filter-out $(KCONFIG_MAKE_KNOWN) CONFIG_%,$(KCONFIG_MAKE_VARIABLES))

# Without an equals sign it is a goal, to which make would come when the goals before it are done.
BARE := $(firstword $(filter $(KCONFIG_MAKE_KNOWN) CONFIG_%,$(MAKECMDGOALS)))
$(if $(BARE),$(error $(BARE) is a variable; write $(BARE)=value))

EXTREMES := alldefconfig allnoconfig allyesconfig allmodconfig tinyconfig randconfig

# The goals that use a variable; what is not here concerns every goal.
GOALS := $(or $(MAKECMDGOALS),all)
USE_FILE := savedefconfig checkconfig
USE_RUN := resume rerun eval plots curve sample export
USE_BEST := eval sample export
USE_DIRECTORY := export
USE_PROMPT := sample
USE_TEMPERATURE := sample
USE_TOP_K := sample
USE_SEED := sample
USE_TOKENS := sample
USE_NAME := new-model new-task new-data
USE_TASK := new-model
USE_DEFCONFIG := defconfig savedefconfig
USE_FRAGMENT := defconfig defconfig-% %_defconfig mergeconfig
USE_STRICT := $(USE_FRAGMENT) %.config
USE_SET := setconfig
USE_A := diffconfig
USE_B := diffconfig
USE_SYM := explain
USE_Q := searchconfig
# A shipped configuration is all that it is, as in the kernel.
USE_KCONFIG_ALLCONFIG := $(EXTREMES) $(if $(call given,DEFCONFIG),,defconfig)
USE_KCONFIG_SEED := randconfig
USE_KCONFIG_PROBABILITY := randconfig
USE_KCONFIG_NOSILENTUPDATE := syncconfig
USE_ANNEAL_CONFIG_PATH := $(USE_STRICT) tinyconfig list-defconfigs diffconfig train-%
USE_GPU := plan elastic-check
USE_JSON := plan preflight
SCALING := scaling scaling-plan scaling-run scaling-fit scaling-plot scaling-report
$(foreach name,CORPUS OUT,$(eval USE_$(name) := $(SCALING)))
$(foreach name,QUICK BUDGET COMPARE EPOCHS BATCH DEVICE,$(eval USE_$(name) := scaling scaling-plan scaling-run))
USE_EXP := experiment
USE_QUICK += experiment
USE_OUT += experiment
USE_OUT += sweep sweep-yaml
USE_SWEEP := sweep
USE_JOBS := sweep
USE_OUT += curve
USE_COLUMN := curve
USE_THRESHOLD := curve
USE_REFERENCE := curve
USE_TOLERANCE := curve
USE_TO := emit
USE_IMAGE := emit
USE_STORAGE := emit
USE_ACCELERATOR := emit
# Those that write a configuration say that CONFIG_ variables are for runs.
USE_CONFIG := train train-% launch-print sbatch submit emit plan probe preflight bench experiment sweep-yaml checkconfig explain searchconfig menuconfig nconfig guiconfig xconfig config \
	oldconfig olddefconfig syncconfig $(EXTREMES) savedefconfig setconfig mergeconfig defconfig defconfig-% \
	%_defconfig %.config all
used_by = $(USE_$(if $(filter CONFIG_%,$(1)),CONFIG,$(1)))
unused = $(if $(filter $(used_by),$(GOALS)),,$(1))
NOT_LIMITED := PYTHON VENV O V KCONFIG_CONFIG GOMP_SPINCOUNT
LIMITED := $(filter $(filter-out $(NOT_LIMITED),$(KCONFIG_MAKE_KNOWN)) CONFIG_%,$(KCONFIG_MAKE_VARIABLES))
UNUSED := $(firstword $(foreach name,$(LIMITED),$(call unused,$(name))))
# An empty shell variable is a mistake, but for these.
NO_FLAG := $(firstword $(foreach name,JSON BEST STRICT QUICK,$(if $(filter-out '1',$(call given,$(name))),$(name))))
MAY_BE_EMPTY := STRICT JSON BEST QUICK KCONFIG_% ANNEAL_% CONFIG_%
EMPTY := $(firstword $(foreach name,$(filter-out $(MAY_BE_EMPTY),$(LIMITED)),$(if $($(name)),,$(name))))

# One goal after the other, so that make -j defconfig-lenet5 train means what it says.
.NOTPARALLEL:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

all: train

##@ Configuration
## menuconfig: change the configuration in a menu
## nconfig: the same
## guiconfig: change the configuration in a window
## xconfig: the same
## config: ask for every option, line by line
## oldconfig: ask for the options that are new
## olddefconfig: give every symbol that is new its default
## syncconfig: olddefconfig without a word, and include/config/auto.conf
## defconfig: start from DEFCONFIG=NAME, or, as alldefconfig does, from all defaults
## defconfig-NAME: start from defconfigs/NAME; defconfig-NAME+FRAGMENT adds a fragment, FRAGMENT= files
## NAME_defconfig: the same
## FRAGMENT.config: put a fragment on top of the configuration; STRICT=1 refuses to replace values
## mergeconfig: the same with the files FRAGMENT=
## setconfig: set options: SET="NAME=value NAME=value"
## alldefconfig: all defaults; KCONFIG_ALLCONFIG= names a file of what is to be otherwise, also for the next five
## allnoconfig: as much off as possible
## allyesconfig: as much on as possible
## allmodconfig: allyesconfig, for want of modules
## randconfig: options at random; KCONFIG_SEED= KCONFIG_PROBABILITY=
## tinyconfig: the smallest run on a CPU
## savedefconfig: write what differs from the defaults to ./defconfig, to FILE=, or as DEFCONFIG=NAME
## update-defconfigs: write every shipped configuration in that form
## list-defconfigs: the configurations to start from
## checkconfig: check the configuration, or FILE=, strictly
## listnewconfig: what the configuration does not mention, with defaults
## helpnewconfig: the same with help
## diffconfig: compare A= and B=: files, shipped configurations or run directories
## explain: all about the option SYM=: its value, where that comes from, what forbids it
## searchconfig: find options by the words Q=
## kconfig-docs: write docs/options.md from the Kconfig files
## kconfig-lint: check Kconfig files, configurations and fragments
CONFIGURATION := menuconfig nconfig guiconfig xconfig config oldconfig olddefconfig syncconfig \
	listnewconfig helpnewconfig $(EXTREMES) update-defconfigs list-defconfigs kconfig-docs kconfig-lint
$(CONFIGURATION): ready
	$(KCONF) $@

savedefconfig: ready
	$(KCONF) $@ $(call option,name,DEFCONFIG) $(call last,FILE)

checkconfig: ready
	$(KCONF) $@ $(call last,FILE)

setconfig: ready
	$(KCONF) $@ $(call last,SET)

diffconfig: ready symbols
	$(KCONF) $@ $(if $(call given,A),-a=$(call given,A)) $(if $(call given,B),-b=$(call given,B))

explain: ready
	$(KCONF) $@ $(call last,SYM)

searchconfig: ready
	$(KCONF) $@ $(call last,Q)

strict = $(if $(call given,STRICT),--strict)
on_top = $(call option,fragments,FRAGMENT) $(strict)
defconfig: ready
	$(KCONF) defconfig $(on_top) $(call last,DEFCONFIG)

mergeconfig: ready
	$(KCONF) merge $(on_top)

# The static rules are what a shell completes; the pattern takes A+B and answers a wrong name.
DEFCONFIGS := $(addprefix defconfig-,$(NAMES)) $(addsuffix _defconfig,$(NAMES)) $(filter defconfig-%,$(SLASHED))
$(DEFCONFIGS): ready
	$(KCONF) defconfig $(on_top) $(call quote,$(patsubst %_defconfig,%,$(@:defconfig-%=%)))

defconfig-%: ready
	$(KCONF) defconfig $(on_top) $(call quote,$*)

%_defconfig: ready
	$(KCONF) defconfig $(on_top) $(call quote,$*)

FRAGMENT_TARGETS := $(addsuffix .config,$(FRAGMENTS))
$(FRAGMENT_TARGETS): ready
	$(KCONF) merge $(strict) $(call quote,$(@:%.config=%))

%.config: ready
	$(KCONF) merge $(strict) $(call quote,$*)

##@ Training
## train: train the configured model; goes on with the same run if it was interrupted
## train-NAME: configure NAME in its own directory build/NAME, or O=, and train
## rerun: train the newest run, or RUN=, again by its own configuration; says what is different
## resume: go on with the newest interrupted run, or with RUN=
## eval: evaluate the newest run, or RUN=; BEST=1 takes its best checkpoint
## sample: let the newest language model, or RUN=, continue PROMPT=; TEMPERATURE= TOP_K= SEED= TOKENS=
## export: write weights to DIRECTORY= in the layout of Hugging Face transformers
## plots: draw the curves of the newest run, or of RUN=
## curve: when the newest run, or RUN=, reached THRESHOLD=; compares it with REFERENCE= within TOLERANCE=; COLUMN= OUT=
## plan: show what would be decided for this machine, or for GPU=h100-80gx4:70G, GPU=all; JSON=1
## probe: measure which micro-batch trains fastest here, for CONFIG_AUTO_METHOD_PROBE
## preflight: eleven checks of the configured run on a few samples, in about a minute; JSON=1
## sweep: train all runs of defconfigs/sweeps/SWEEP=.yaml that are not there yet, and compare them; JOBS= OUT=
## sweep-yaml: write the configuration as such a file, to add axes to: to OUT=NAME.yaml, or show it
## scaling: train several sizes and judge how the loss falls; QUICK=1 BUDGET= COMPARE= CORPUS= EPOCHS= BATCH= DEVICE= OUT=
## scaling-plan: what each run of it would cost, and what they could not show
## scaling-run: its plan, gate and runs alone
## scaling-fit: fit the laws of its results
## scaling-plot: draw its results
## scaling-report: say what its results show
## experiment: try the configured looped transformer: EXP=1..4, ablation or scaling_laws; QUICK=1 OUT=
## launch-print: show the command that make train runs on each machine
## sbatch: write run.sbatch, with which SLURM trains the configuration, beside it; submits nothing
## submit: write it and submit it
## emit: write run.TO.yaml for TO=kubernetes, skypilot or ray, beside it; IMAGE= STORAGE= ACCELERATOR=; not run there
## elastic-check: what LatentWire's rules make of 1 to 16 GPUs of this machine's kind, or of GPU=
## elastic-demo: train on one process and on two by these rules, and compare
## bench: compare the step rate of the configured training with a bare loop's, and bf16 with fp32; of a TRM its two mixers
train: configured ready
	$(TRAIN) $@

plan: configured ready
	$(TRAIN) $@ $(call option,gpu,GPU) $(if $(call given,JSON),--json)

probe: configured ready
	$(TRAIN) $@

preflight: configured ready
	$(TRAIN) $@ $(if $(call given,JSON),--json)

# A stored run brings its own configuration.
resume rerun: ready symbols
	$(TRAIN) $@ $(call last,RUN)

eval: ready symbols
	$(TRAIN) $@ $(if $(call given,BEST),--best) $(call last,RUN)

sample: ready symbols
	$(TRAIN) $@ $(if $(call given,BEST),--best) $(call option,prompt,PROMPT) $(call option,temperature,TEMPERATURE) \
	      $(call option,top-k,TOP_K) $(call option,seed,SEED) $(call option,tokens,TOKENS) $(call last,RUN)

export: ready symbols
	$(TRAIN) $@ $(if $(call given,BEST),--best) $(call option,directory,DIRECTORY) $(call last,RUN)

plots: ready symbols
	$(quiet)$(PY) -m scripts.plots --runs $(call quote,$(RUNS)) $(call last,RUN)

curve: ready symbols
	$(quiet)$(PY) -m scripts.curve --runs $(call quote,$(RUNS)) $(call option,column,COLUMN) $(call option,threshold,THRESHOLD) \
	      $(call option,reference,REFERENCE) $(call option,tolerance,TOLERANCE) $(call option,out,OUT) $(call last,RUN)

experiment: configured ready
	$(quiet)$(PY) -m scripts.eqprop $(call option,experiment,EXP) $(if $(call given,QUICK),--quick) $(call option,out,OUT)

launch-print: configured ready
	$(CLUSTER) print

sbatch submit: configured ready
	$(CLUSTER) $@

emit: configured ready
	$(CLUSTER) $@ $(call option,to,TO) $(call option,image,IMAGE) $(call option,storage,STORAGE) \
	      $(call option,accelerator,ACCELERATOR)

elastic-check: ready symbols
	$(quiet)$(PY) -m scripts.elastic check $(call given,GPU)

elastic-demo: ready symbols
	$(quiet)$(PY) -m scripts.elastic demo

bench: configured ready
	$(quiet)$(PY) -m scripts.bench.throughput

$(SCALING): ready symbols
	$(quiet)$(PY) -m scripts.scaling $(if $(filter scaling,$@),all,$(@:scaling-%=%)) $(if $(call given,QUICK),--quick) $(call option,budget,BUDGET) \
	      $(call option,compare,COMPARE) $(call option,corpus,CORPUS) $(call option,epochs,EPOCHS) \
	      $(call option,batch,BATCH) $(call option,device,DEVICE) $(call option,out,OUT)

sweep: ready symbols
	$(quiet)$(PY) -m scripts.sweep $(call option,jobs,JOBS) $(call option,out,OUT) $(call given,SWEEP)

sweep-yaml: configured ready
	$(quiet)$(PY) -m scripts.sweep --yaml $(call option,out,OUT)

# train-NAME keeps to a directory of its own, unless O= or KCONFIG_CONFIG= names another place.
TRAIN_NAMES := $(addprefix train-,$(NAMES)) $(filter train-%,$(SLASHED))
named_out = $(or $(O),build/$(@:train-%=%))
named_config = $(if $(config_is_named),$(KCONFIG_CONFIG),$(named_out)/.config)
define train_named
$(quiet)KCONFIG_CONFIG=$(call quote,$(named_config)) $(PY) scripts/kconf.py defconfig $(call quote,$(@:train-%=%))
$(quiet)KCONFIG_CONFIG=$(call quote,$(named_config)) $(PY) -m train --runs $(call quote,$(named_out)/runs) train
endef
$(TRAIN_NAMES): ready
	$(train_named)

train-%: ready
	$(train_named)

##@ Development
## test: every test
## test-fast: the tests that take less than about half a second each
## test-light: the tests of configuration on every Python and kconfiglib that is promised
## test-faults: each test of a killed or interrupted run five times, counted
## test-slurm: submit, preempt, requeue and cancel on a SLURM of this machine, started for it; where there is one
## check: style, form and types
## new-model: scaffold models/NAME for TASK=classify, TASK=lm or a task of your own
## new-task: scaffold train/tasks/NAME
## new-data: scaffold lib/data/datasets/NAME
test: ready-dev symbols
	$(quiet)$(PY) -m pytest -n 2 --dist worksteal

test-fast: ready-dev symbols
	$(quiet)$(PY) -m pytest -n 2 --dist worksteal -m "not slow"

test-light: ready symbols
	$(quiet)$(PY) -m scripts.light_matrix

test-faults: ready-dev symbols
	$(quiet)$(PY) -m scripts.faults

test-slurm: ready-dev symbols
	$(quiet)$(PY) -m pytest -rs -m slurm tests/e2e/test_slurm.py

check: ready-dev symbols
	$(quiet)$(PY) -m ruff check
	$(quiet)$(PY) -m ruff format --check
	$(quiet)$(PY) -m mypy

new-model: ready symbols
	$(quiet)$(PY) -m scripts.scaffold model $(or $(call given,NAME),'') $(or $(call given,TASK),'')

new-task new-data: ready symbols
	$(quiet)$(PY) -m scripts.scaffold $(@:new-%=%) $(or $(call given,NAME),'')

##@ Housekeeping
## clean: remove caches
## mrproper: clean, and remove the configuration and the virtual environment
## distclean: mrproper, and remove runs/ and build/ (or O=); never data
## data-clean: remove data/: downloaded and generated data sets
## printvars: show the variables of this file
## help: show this text
clean: symbols
	$(quiet)rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	$(quiet)find lib models train scripts tests -name __pycache__ -prune -exec rm -rf {} +

# A virtual environment that was not made here is not removed here.
mrproper: clean
	$(quiet)rm -f $(call quote,$(KCONFIG_CONFIG)) $(call quote,$(KCONFIG_CONFIG).old)
	$(quiet)rm -rf $(call quote,$(KCONFIG_OUTPUT)/include/config)
	$(quiet)if [ -e $(call quote,$(VENV)/.created) ] || [ -e $(call quote,$(VENV)/.creating) ]; then rm -rf $(call quote,$(VENV)); fi

distclean: mrproper
	$(quiet)rm -rf $(if $(O),$(call quote,$(O)/runs),runs build)

data-clean: symbols
	$(quiet)rm -rf data

printvars: symbols
	@$(foreach name,$(KCONFIG_MAKE_KNOWN),printf '%s=%s\n' $(name) \
	      $(call quote,$(subst $(newline), ,$(if $(filter environment%,$(origin $(name))),$(value $(name)),$($(name)))));)

help: symbols
	@awk '/^##@ /{printf "\n%s\n", substr($$0, 5)} \
	      /^## /{colon = index($$0, ": "); printf "  %-18s %s\n", substr($$0, 4, colon - 4), substr($$0, colon + 2)}' Makefile
	@printf '\nVariables: %s, and CONFIG_NAME=value\nfor one run without touching .config. V=1 shows the commands.\n' \
	      '$(KCONFIG_MAKE_KNOWN)'

TARGETS := all $(CONFIGURATION) savedefconfig checkconfig defconfig mergeconfig setconfig diffconfig explain \
	searchconfig $(DEFCONFIGS) $(FRAGMENT_TARGETS) train resume rerun plan probe preflight eval sample export plots curve bench \
	launch-print sbatch submit emit elastic-check elastic-demo sweep sweep-yaml $(SCALING) experiment \
	$(TRAIN_NAMES) test test-fast test-light test-faults test-slurm check new-model \
	new-task new-data \
	clean mrproper distclean data-clean printvars help
INTERNAL := variables symbols configured ready ready-dev
.PHONY: $(TARGETS) $(INTERNAL)

CHECK = if $(PY) -c 'import kconfiglib' 2>/dev/null; then $(PY) scripts/kconf.py check-variables; fi
# A goal that is no target (make trian), or only a directory (make runs). Make looks after its own file first, also
# with -n: there it is told before any other goal is begun. What programs that complete words ask for is let pass.
STRANGE := $(filter-out $(TARGETS) $(INTERNAL) $(VENV)/.stamp% defconfig-% %_defconfig train-% %.config .DEFAULT .PHONY :,$(MAKECMDGOALS)) \
	$(filter defconfig- _defconfig train- .config,$(MAKECMDGOALS))
ifneq ($(strip $(STRANGE)),)
.PHONY: Makefile
Makefile:
	@export KCONFIG_MAKE_GOALS=$(call quote,$(strip $(STRANGE))) KCONFIG_MAKE_TARGETS='$(TARGETS)'; $(CHECK)
	@printf 'error: %s is no target; make help shows what there is\n' $(call quote,$(firstword $(STRANGE))) >&2; exit 2
endif

# A variable that nothing reads (make train LR=3) stops every target, whatever it is. The script
# knows the symbols and suggests one; before there is a Python environment make says it alone.
# Nor is one that the goals do not use taken and dropped.
variables:
ifneq ($(UNKNOWN),)
	@$(CHECK)
	@echo 'error: $(firstword $(UNKNOWN)) is not a variable of this Makefile;' \
	      'a symbol of the configuration is given as CONFIG_NAME=value' >&2; exit 2
endif
ifneq ($(UNUSED),)
	@printf 'error: %s is not used by make %s; it is for: %s%s\n' $(call quote,$(UNUSED)) $(call quote,$(GOALS)) \
	      $(call quote,$(subst %,NAME,$(call used_by,$(UNUSED)))) \
	      $(if $(filter CONFIG_%,$(UNUSED)),$(if $(filter $(USE_RUN),$(GOALS)),'; a stored run keeps its configuration$(if $(filter resume_CONFIG_NUM_DEVICES,$(GOALS)_$(UNUSED)),; make train goes on with other devices)')) >&2; exit 2
endif
ifneq ($(EMPTY),)
	@echo 'error: $(EMPTY)= is empty; give it a value, or leave it out' >&2; exit 2
endif
ifneq ($(filter-out '0' '1',$(call given,V)),)
	@echo 'error: V is 1 to show commands and origins, or 0' >&2; exit 2
endif
ifneq ($(NO_FLAG),)
	@echo 'error: $(NO_FLAG) is 1, or left out' >&2; exit 2
endif

# What loads the configuration checks CONFIG_ names itself; the other targets check them here.
symbols: variables
ifneq ($(filter CONFIG_%,$(KCONFIG_MAKE_VARIABLES)),)
	@$(CHECK)
endif

configured: variables
	@if [ ! -e $(call quote,$(KCONFIG_CONFIG)) ]; then printf '%s\n' \
	      'error: there is no configuration; make one of these three ways:' \
	      '  make defconfig-lenet5   start from one that is known to work (make list-defconfigs)' \
	      '  make menuconfig         choose in a menu' \
	      '  make alldefconfig       take every default' >&2; exit 2; fi

# The Python environment: made when the lock changes, when its interpreter has gone, or checked
# against a PYTHON that was asked for by name. With VENV= empty it is checked and never touched.
BOOTSTRAP = $(quiet)scripts/bootstrap.sh $(call quote,$(VENV)) $(call quote,$(PYTHON))
SAME := $(if $(filter command,$(origin PYTHON)),--same-python)
ifeq ($(VENV),)
ready: variables
	$(BOOTSTRAP) requirements.txt

ready-dev: ready
	$(BOOTSTRAP) requirements-dev.txt
else
ready: variables $(VENV)/.stamp
ready-dev: ready $(VENV)/.stamp-dev

STALE := $(if $(SAME)$(if $(wildcard $(VENV)/bin/python),,gone),always)
$(VENV)/.stamp: requirements.lock $(STALE)
	$(BOOTSTRAP) requirements.txt $(SAME)

$(VENV)/.stamp-dev: requirements-dev.lock $(VENV)/.stamp
	$(BOOTSTRAP) requirements-dev.txt $(SAME)
endif

.PHONY: always
