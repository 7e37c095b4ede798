/* An NVML that replays a trace, for processes that load libnvidia-ml.so.1 as pynvml does.

   FAKE_NVML_TRACE names text files, separated by ':', later lines before earlier ones:

       <start or ms since the window opened> <what> <values>

   The window opens, for all processes together, when total energy is asked for the first time: the
   file FAKE_NVML_OPENED then holds the time. Until then only the lines of "start" hold.

   what            values
   utilization     gpu % · memory %
   power           mW
   energy          mJ at this time · mW from here on
   clocks          SM MHz · memory MHz
   temperature     °C
   reasons         bit mask of clocks event reasons
   gpm             SM active % · occupancy % · DRAM bandwidth % · tensor %
   processes       how many have a context, the one that started the sampler being one of them
   foreign_pids    1: processes are numbered as in another PID namespace
   mig             1: the device is a MIG instance, known by its MIG UUID only
   stall           ms in which a reading of utilization does not return
   refuse <call>   error code of this call, by the names above, "gpm_tensor" or "*"; 0 = none

   Exports what the meters call and nothing else. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, NOT_FOUND = 6, TOO_SMALL = 7, DRIVER_NOT_LOADED = 9, MAX_LINES = 256 };
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { char *short_name, *long_name, *unit; } Info;
typedef struct { unsigned id; int ret; double value; Info info; } Metric;
typedef struct { unsigned version, count; void *first, *last; Metric metrics[333]; } Request;
typedef struct { unsigned version, supported; } Support;
typedef struct { long at_ms; char what[24]; double value[4]; } Line;

static const char UUID[] = "00000000-1111-2222-3333-444444444444";
static Line lines[MAX_LINES];
static int num_lines;

static long long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static long since_opened_ms(void) { /* -1 until the window opened */
    long long opened = 0;
    FILE *file = fopen(getenv("FAKE_NVML_OPENED"), "r");
    if (!file) return -1;
    int found = fscanf(file, "%lld", &opened);
    fclose(file);
    return found == 1 ? (long)(now_ms() - opened) : -1;
}

static void open_window(void) {
    int file = open(getenv("FAKE_NVML_OPENED"), O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (file < 0) return; /* it is open */
    dprintf(file, "%lld\n", now_ms());
    close(file);
}

static void read_file(const char *path) {
    char text[256], at[24], rest[200];
    FILE *file = fopen(path, "r");
    if (!file) { fprintf(stderr, "fake NVML: no trace %s\n", path); abort(); }
    while (fgets(text, sizeof text, file)) {
        Line line = {0};
        if (sscanf(text, "%23s %23s %199[^\n]", at, line.what, rest) != 3 || at[0] == '#') continue;
        if (num_lines == MAX_LINES) abort();
        line.at_ms = strcmp(at, "start") ? atol(at) : -1;
        char *values = rest;
        if (!strcmp(line.what, "refuse")) { /* "refuse power 3" is kept as what = "!power" */
            int used = 0;
            line.what[0] = '!';
            if (sscanf(rest, "%22s %n", line.what + 1, &used) != 1) abort();
            values = rest + used;
        }
        for (int i = 0; i < 4; i++) line.value[i] = strtod(values, &values);
        lines[num_lines++] = line;
    }
    fclose(file);
}

static const Line *at(const char *what) { /* the last line of this kind whose time has come */
    static const Line none;
    const Line *found = &none;
    long now = since_opened_ms();
    for (int i = 0; i < num_lines; i++)
        if (lines[i].at_ms <= now && !strcmp(lines[i].what, what)) found = &lines[i];
    return found;
}

static int refused(const char *call) {
    char what[24];
    snprintf(what, sizeof what, "!%s", call);
    int code = (int)at(what)->value[0];
    return code ? code : (int)at("!*")->value[0];
}

int nvmlInitWithFlags(unsigned flags) {
    const char *paths = getenv("FAKE_NVML_TRACE");
    if (!paths || !getenv("FAKE_NVML_OPENED")) return DRIVER_NOT_LOADED;
    char *all = strdup(paths);
    num_lines = 0;
    for (char *path = strtok(all, ":"); path; path = strtok(NULL, ":")) read_file(path);
    free(all);
    return refused("init");
}

int nvmlShutdown(void) { return refused("shutdown"); }

const char *nvmlErrorString(int code) { return "refused by the trace"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    const char *kind = at("mig")->value[0] ? "MIG-" : "GPU-";
    *handle = lines;
    return strncmp(uuid, kind, 4) || strcmp(uuid + 4, UUID) ? NOT_FOUND : OK;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.159.04");
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *mw) {
    *mw = 700000;
    return refused("power");
}

int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates) {
    const Line *stall = at("stall");
    while (stall->value[0] && since_opened_ms() < stall->at_ms + stall->value[0]) usleep(10000);
    rates->gpu = (unsigned)at("utilization")->value[0];
    rates->memory = (unsigned)at("utilization")->value[1];
    return refused("utilization");
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) {
    *mw = (unsigned)at("power")->value[0];
    return refused("power");
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *mj) {
    open_window();
    const Line *line = at("energy");
    long from_ms = line->at_ms < 0 ? 0 : line->at_ms;
    *mj = (unsigned long long)(line->value[0] + line->value[1] * (since_opened_ms() - from_ms) / 1e3);
    return refused("energy");
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) {
    *mhz = (unsigned)at("clocks")->value[kind == 1 ? 0 : 1]; /* 1 = SM, 2 = memory */
    return refused("clocks");
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    *celsius = (unsigned)at("temperature")->value[0];
    return refused("temperature");
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *bits) {
    *bits = (unsigned long long)at("reasons")->value[0];
    return refused("reasons");
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    unsigned room = *count, num = (unsigned)at("processes")->value[0];
    int code = refused("processes");
    *count = num;
    if (code) return code;
    if (room < num) return TOO_SMALL;
    for (unsigned i = 0; i < num; i++) {
        unsigned own = at("foreign_pids")->value[0] ? 3000000 : (unsigned)getppid();
        found[i] = (Process){.pid = i ? 4000000 + i : own, .bytes = 1 << 30};
    }
    return OK;
}

int nvmlGpmQueryDeviceSupport(void *handle, Support *support) {
    support->supported = refused("gpm") == OK;
    return OK;
}

int nvmlGpmSampleAlloc(void **sample) {
    *sample = malloc(8);
    return OK;
}

int nvmlGpmSampleFree(void *sample) {
    free(sample);
    return refused("gpm");
}

int nvmlGpmSampleGet(void *handle, void *sample) { return refused("gpm"); }

int nvmlGpmMetricsGet(Request *request) {
    static const unsigned ids[] = {2, 3, 10, 5}; /* SM active, occupancy, DRAM bandwidth, tensor */
    for (unsigned i = 0; i < request->count; i++) {
        Metric *metric = &request->metrics[i];
        metric->ret = metric->id == 5 ? refused("gpm_tensor") : OK;
        for (int j = 0; j < 4; j++)
            if (metric->id == ids[j]) metric->value = at("gpm")->value[j];
    }
    return refused("gpm");
}
